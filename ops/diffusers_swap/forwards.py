"""Diffusers' transformer blocks, norms and attention processors with the fused ops in their forward.

Each class stands for the Diffusers class that it extends (`FUSED`) and computes the same from the same parameters, with
one rounding where the original has several. B batch, L tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol, TypedDict

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.normalization import (
    AdaLayerNorm,
    AdaLayerNormContinuous,
    AdaLayerNormZero,
    AdaLayerNormZeroSingle,
    CogVideoXLayerNormZero,
    FP32LayerNorm,
)
from diffusers.models.transformers import transformer_flux as flux
from diffusers.models.transformers import transformer_hunyuan_video as hunyuan
from diffusers.models.transformers import transformer_wan as wan
from diffusers.models.transformers.cogvideox_transformer_3d import CogVideoXBlock
from torch import Tensor, nn

from ops.kernels.base.segments import Segments
from ops.kernels.gate_residual.op import gate_residual, gate_residual_ln_modulate
from ops.kernels.norm_modulate.op import ln_modulate
from ops.kernels.qk_rope.op import qk_norm_rope

FUSED: dict[type, type] = {}  # Diffusers class -> its fused subclass
Rope = tuple[Tensor, Tensor]


class Norm(Protocol):
    """What LayerNorm and RMSNorm of torch and Diffusers share. Either may lack a bias, and RMSNorm has none."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...


class NormSettings(TypedDict):
    """The settings of a norm as the fused ops take them."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    rms: bool


class DoubleBlock(Protocol):
    """The parts of the double-stream block of FLUX and HunyuanVideo."""

    @property
    def norm1(self) -> Callable[..., tuple[Tensor, ...]]: ...

    @property
    def norm1_context(self) -> Callable[..., tuple[Tensor, ...]]: ...

    @property
    def norm2(self) -> Norm: ...

    @property
    def norm2_context(self) -> Norm: ...

    @property
    def ff(self) -> Callable[[Tensor], Tensor]: ...

    @property
    def ff_context(self) -> Callable[[Tensor], Tensor]: ...


def stands_for(original: type) -> Callable[[type], type]:
    """Register a fused subclass. It keeps the name, by which Diffusers finds repeated blocks and split points."""

    def register(replacement: type) -> type:
        replacement.__name__ = original.__name__
        FUSED[original] = replacement
        return replacement

    return register


def _dense(batch: int, tokens: int, device: torch.device) -> Segments:
    """Segments of a batch, kept for the next norms. Not while something traces (a compiler, an export, fake tensors),
    whose tensors end with it, nor in a CUDA graph, which reads them after they have left the cache."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return Segments.dense(batch, tokens, device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return Segments.dense(batch, tokens, device)
    with torch.inference_mode(False):  # training may follow, which cannot save inference tensors
        return _kept(batch, tokens, device)


@lru_cache(maxsize=64)
def _kept(batch: int, tokens: int, device: torch.device) -> Segments:
    return Segments.dense(batch, tokens, device)


def segments_of(x_BLD: Tensor, table: Tensor) -> Segments | None:
    """One table row per sample; None where one row serves all tokens or each token has its own."""
    batch, tokens = x_BLD.shape[:2]
    per_sample = table.numel() // table.shape[-1] == batch
    return _dense(batch, tokens, x_BLD.device) if batch > 1 and per_sample else None


def modulate(norm: Norm, x_BLD: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """norm(x) * (1 + scale) + shift, in the dtype of x, with tables [B, D] or [B, 1, D]."""
    return ln_modulate(x_BLD, scale, shift, segments_of(x_BLD, scale), **_settings(norm))


def gate_and_modulate(
    norm: Norm, x_BLD: Tensor, y_BLD: Tensor, gate: Tensor | None, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """x + gate * y and its modulated norm."""
    return gate_residual_ln_modulate(x_BLD, y_BLD, gate, scale, shift, segments_of(x_BLD, scale), **_settings(norm))


def gated(x_BLD: Tensor, y_BLD: Tensor, gate: Tensor) -> Tensor:
    """x + gate * y."""
    return gate_residual(x_BLD, y_BLD, gate, segments_of(x_BLD, gate))


def _settings(norm: Norm) -> NormSettings:
    """weight, bias, eps and kind of a LayerNorm or RMSNorm module."""
    rms = not isinstance(norm, nn.LayerNorm)
    return {"weight": norm.weight, "bias": getattr(norm, "bias", None), "eps": norm.eps, "rms": rms}


def _clip_half(x: Tensor) -> Tensor:
    """FLUX's guard against the overflow of fp16."""
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


@stands_for(nn.LayerNorm)
class FusedLayerNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        if len(self.normalized_shape) != 1 or input.ndim < 2:
            return super().forward(input)
        return ln_modulate(input, **_settings(self))


@stands_for(FP32LayerNorm)
class FusedFP32LayerNorm(FP32LayerNorm):
    def forward(self, inputs: Tensor) -> Tensor:
        return ln_modulate(inputs, out_dtype=inputs.dtype, **_settings(self))


@stands_for(AdaLayerNorm)
class FusedAdaLayerNorm(AdaLayerNorm):
    def forward(self, x: Tensor, timestep: Tensor | None = None, temb: Tensor | None = None) -> Tensor:
        if self.chunk_dim != 1 or self.emb is not None or temb is None:
            return super().forward(x, timestep, temb)
        shift, scale = self.linear(self.silu(temb)).chunk(2, dim=1)
        return modulate(self.norm, x, scale, shift)


@stands_for(AdaLayerNormZero)
class FusedAdaLayerNormZero(AdaLayerNormZero):
    def forward(self, x, timestep=None, class_labels=None, hidden_dtype=None, emb=None):
        if self.emb is not None:
            emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.linear(self.silu(emb)).chunk(6, dim=1)
        return modulate(self.norm, x, scale, shift), gate, shift_mlp, scale_mlp, gate_mlp


@stands_for(AdaLayerNormZeroSingle)
class FusedAdaLayerNormZeroSingle(AdaLayerNormZeroSingle):
    def forward(self, x: Tensor, emb: Tensor | None = None):
        shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
        return modulate(self.norm, x, scale, shift), gate


@stands_for(AdaLayerNormContinuous)
class FusedAdaLayerNormContinuous(AdaLayerNormContinuous):
    def forward(self, x: Tensor, conditioning_embedding: Tensor) -> Tensor:
        scale, shift = self.linear(self.silu(conditioning_embedding).to(x.dtype)).chunk(2, dim=1)
        return modulate(self.norm, x, scale, shift)


@stands_for(CogVideoXLayerNormZero)
class FusedCogVideoXLayerNormZero(CogVideoXLayerNormZero):
    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor, temb: Tensor):
        shift, scale, gate, text_shift, text_scale, text_gate = self.linear(self.silu(temb)).chunk(6, dim=1)
        return (
            modulate(self.norm, hidden_states, scale, shift),
            modulate(self.norm, encoder_hidden_states, text_scale, text_shift),
            gate[:, None, :],
            text_gate[:, None, :],
        )


@stands_for(CogVideoXBlock)
class FusedCogVideoXBlock(CogVideoXBlock):
    def forward(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, attention_kwargs=None):
        x, text = hidden_states, encoder_hidden_states
        h, text_h, gate, text_gate = self.norm1(x, text, temb)
        attention, text_attention = self.attn1(
            hidden_states=h, encoder_hidden_states=text_h, image_rotary_emb=image_rotary_emb, **(attention_kwargs or {})
        )
        norm = self.norm2
        shift, scale, ff_gate, text_shift, text_scale, text_ff_gate = norm.linear(norm.silu(temb)).chunk(6, dim=1)
        x, h = gate_and_modulate(norm.norm, x, attention, gate, scale, shift)
        text, text_h = gate_and_modulate(norm.norm, text, text_attention, text_gate, text_scale, text_shift)
        ff = self.ff(torch.cat([text_h, h], dim=1))
        num_text = text.shape[1]
        return gated(x, ff[:, num_text:], ff_gate), gated(text, ff[:, :num_text], text_ff_gate)


@stands_for(wan.WanTransformerBlock)
class FusedWanTransformerBlock(wan.WanTransformerBlock):
    def forward(self, hidden_states, encoder_hidden_states, temb, rotary_emb):
        table = self.scale_shift_table if temb.ndim == 3 else self.scale_shift_table.unsqueeze(0)
        # [B, 6, D], or [B, L, 6, D] with a timestep per token
        shift, scale, gate, ff_shift, ff_scale, ff_gate = (table + temb.float()).unbind(-2)
        x = hidden_states
        y = self.attn1(modulate(self.norm1, x, scale, shift), None, None, rotary_emb)
        if isinstance(self.norm2, nn.LayerNorm):
            settings = _settings(self.norm2)
            x, h = gate_residual_ln_modulate(x, y, gate, segments=segments_of(x, gate), **settings)
        else:
            x = h = gated(x, y, gate)
        y = self.attn2(h, encoder_hidden_states, None, None)
        x, h = gate_and_modulate(self.norm3, x, y, None, ff_scale, ff_shift)
        return gated(x, self.ffn(h), ff_gate)


@stands_for(wan.WanAttnProcessor)
class FusedWanAttnProcessor(wan.WanAttnProcessor):
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None) -> Tensor:
        if attn.add_k_proj is not None:  # image to video: two sets of keys
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)
        query, key, value = wan._get_qkv_projections(attn, hidden_states, encoder_hidden_states)
        head_dim = query.shape[-1] // attn.heads
        cos = sin = None
        if rotary_emb is not None:  # [1, L, 1, head_dim], each angle twice
            cos, sin = rotary_emb[0][0, :, 0, 0::2], rotary_emb[1][0, :, 0, 1::2]
        query, key = qk_norm_rope(
            query, key, attn.norm_q.weight, attn.norm_k.weight, cos, sin, head_dim=head_dim, eps=attn.norm_q.eps
        )
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (query, key, value))
        out = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=0.0,
            is_causal=False,
            backend=self._attention_backend,
            parallel_config=self._parallel_config if encoder_hidden_states is None else None,
        )
        out = out.flatten(2, 3).type_as(query)
        return attn.to_out[1](attn.to_out[0](out))


def double_block(
    block: DoubleBlock, x: Tensor, text: Tensor, temb: Tensor, attention: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The double-stream block of FLUX and HunyuanVideo; the attention's further outputs come third."""
    h, gate, shift_mlp, scale_mlp, gate_mlp = block.norm1(x, emb=temb)
    text_h, text_gate, text_shift_mlp, text_scale_mlp, text_gate_mlp = block.norm1_context(text, emb=temb)
    y, text_y, *rest = attention(h, text_h)
    x, h = gate_and_modulate(block.norm2, x, y, gate, scale_mlp, shift_mlp)
    text, text_h = gate_and_modulate(block.norm2_context, text, text_y, text_gate, text_scale_mlp, text_shift_mlp)
    return gated(x, block.ff(h), gate_mlp), gated(text, block.ff_context(text_h), text_gate_mlp), tuple(rest)


@stands_for(flux.FluxTransformerBlock)
class FusedFluxTransformerBlock(flux.FluxTransformerBlock):
    def forward(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, joint_attention_kwargs=None):
        def attention(h: Tensor, text_h: Tensor) -> tuple[Tensor, ...]:
            return self.attn(
                hidden_states=h,
                encoder_hidden_states=text_h,
                image_rotary_emb=image_rotary_emb,
                **(joint_attention_kwargs or {}),
            )

        x, text, ip_adapter = double_block(self, hidden_states, encoder_hidden_states, temb, attention)
        for extra in ip_adapter:
            x = x + extra
        return _clip_half(text), x


@stands_for(flux.FluxSingleTransformerBlock)
class FusedFluxSingleTransformerBlock(flux.FluxSingleTransformerBlock):
    def forward(self, hidden_states, encoder_hidden_states, temb, image_rotary_emb=None, joint_attention_kwargs=None):
        num_text = encoder_hidden_states.shape[1]
        x = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        h, gate = self.norm(x, emb=temb)
        attention = self.attn(hidden_states=h, image_rotary_emb=image_rotary_emb, **(joint_attention_kwargs or {}))
        y = self.proj_out(torch.cat([attention, self.act_mlp(self.proj_mlp(h))], dim=2))
        x = _clip_half(gated(x, y, gate))
        return x[:, :num_text], x[:, num_text:]


@stands_for(flux.FluxAttnProcessor)
class FusedFluxAttnProcessor(flux.FluxAttnProcessor):
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        projections = flux._get_qkv_projections(attn, hidden_states, encoder_hidden_states)
        query, key, value, text_q, text_k, text_v = projections
        num_text = 0 if attn.added_kv_proj_dim is None else text_q.shape[1]
        query, key = _per_head(query, key, attn.norm_q, attn.norm_k, _rope_rows(image_rotary_emb, num_text, None))
        if attn.added_kv_proj_dim is not None:  # text comes first
            text_rope = _rope_rows(image_rotary_emb, 0, num_text)
            text_q, text_k = _per_head(text_q, text_k, attn.norm_added_q, attn.norm_added_k, text_rope)
            query, key = torch.cat([text_q, query], dim=1), torch.cat([text_k, key], dim=1)
            value = torch.cat([text_v, value], dim=1)
        query, key, value = (x.unflatten(-1, (-1, attn.head_dim)) for x in (query, key, value))
        out = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=attention_mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        out = out.flatten(2, 3).to(query.dtype)
        if encoder_hidden_states is None:
            return out
        num_text = encoder_hidden_states.shape[1]
        text, out = out[:, :num_text], out[:, num_text:]
        return attn.to_out[1](attn.to_out[0](out.contiguous())), attn.to_add_out(text.contiguous())


@stands_for(hunyuan.HunyuanVideoTransformerBlock)
class FusedHunyuanVideoTransformerBlock(hunyuan.HunyuanVideoTransformerBlock):
    def forward(self, hidden_states, encoder_hidden_states, temb, attention_mask=None, freqs_cis=None, *args, **kwargs):
        def attention(h: Tensor, text_h: Tensor) -> tuple[Tensor, ...]:
            return self.attn(
                hidden_states=h, encoder_hidden_states=text_h, attention_mask=attention_mask, image_rotary_emb=freqs_cis
            )

        x, text, _ = double_block(self, hidden_states, encoder_hidden_states, temb, attention)
        return x, text


@stands_for(hunyuan.HunyuanVideoSingleTransformerBlock)
class FusedHunyuanVideoSingleTransformerBlock(hunyuan.HunyuanVideoSingleTransformerBlock):
    def forward(
        self, hidden_states, encoder_hidden_states, temb, attention_mask=None, image_rotary_emb=None, *args, **kwargs
    ):
        num_tokens = hidden_states.shape[1]
        x = torch.cat([hidden_states, encoder_hidden_states], dim=1)
        h, gate = self.norm(x, emb=temb)
        attention = torch.cat(
            self.attn(
                hidden_states=h[:, :num_tokens],
                encoder_hidden_states=h[:, num_tokens:],
                attention_mask=attention_mask,
                image_rotary_emb=image_rotary_emb,
            ),
            dim=1,
        )
        x = gated(x, self.proj_out(torch.cat([attention, self.act_mlp(self.proj_mlp(h))], dim=2)), gate)
        return x[:, :num_tokens], x[:, num_tokens:]


@stands_for(hunyuan.HunyuanVideoAttnProcessor2_0)
class FusedHunyuanVideoAttnProcessor(hunyuan.HunyuanVideoAttnProcessor2_0):
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        if encoder_hidden_states is None or attn.norm_q is None:
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        num_text = encoder_hidden_states.shape[1]
        single_stream = attn.add_q_proj is None
        if single_stream:
            hidden_states = torch.cat([hidden_states, encoder_hidden_states], dim=1)
        rope = _rope_rows(image_rotary_emb, 0, None)
        if single_stream and rope is not None:  # text is not rotated: angle 0
            cos, sin = rope
            rope = (
                torch.cat([cos, cos.new_ones(num_text, cos.shape[1])]),
                torch.cat([sin, sin.new_zeros(num_text, sin.shape[1])]),
            )
        query, key = _per_head(attn.to_q(hidden_states), attn.to_k(hidden_states), attn.norm_q, attn.norm_k, rope)
        value = attn.to_v(hidden_states)
        if not single_stream:  # text comes last
            text_q, text_k = attn.add_q_proj(encoder_hidden_states), attn.add_k_proj(encoder_hidden_states)
            text_q, text_k = _per_head(text_q, text_k, attn.norm_added_q, attn.norm_added_k, None)
            query, key = torch.cat([query, text_q], dim=1), torch.cat([key, text_k], dim=1)
            value = torch.cat([value, attn.add_v_proj(encoder_hidden_states)], dim=1)
        query, key, value = (x.unflatten(2, (attn.heads, -1)) for x in (query, key, value))
        out = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=0.0,
            is_causal=False,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        out = out.flatten(2, 3).to(query.dtype)
        out, text = out[:, :-num_text], out[:, -num_text:]
        if getattr(attn, "to_out", None) is not None:
            out = attn.to_out[1](attn.to_out[0](out))
        if getattr(attn, "to_add_out", None) is not None:
            text = attn.to_add_out(text)
        return out, text


def _per_head(query: Tensor, key: Tensor, norm_q: Norm, norm_k: Norm, rope: Rope | None) -> tuple[Tensor, Tensor]:
    """q and k [B, L, D] with RMSNorm over each head and the rotation of `rope`."""
    cos, sin = rope or (None, None)
    head_dim = norm_q.weight.shape[0]
    return qk_norm_rope(
        query, key, norm_q.weight, norm_k.weight, cos, sin, head_dim=head_dim, per_head=True, eps=norm_q.eps
    )


def _rope_rows(rope: Rope | None, first: int, last: int | None) -> Rope | None:
    """Rows [first, last) of Diffusers' tables [L, head_dim], which hold each angle twice, as [rows, head_dim / 2]."""
    return None if rope is None else (rope[0][first:last, 0::2], rope[1][first:last, 0::2])
