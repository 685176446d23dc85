"""Videos for HDR screens: their values stand for more light than those of sRGB, as which they are grey and flat."""

from __future__ import annotations

from data.ledger import BadSample, Reason

HDR_TRANSFERS = {16: "PQ", 18: "HLG"}  # by the number of ITU-T H.273, which headers and frames have
TONE_MAP = (
    "ffmpeg -i IN -vf zscale=t=linear:npl=100,format=gbrpf32le,zscale=p=bt709,tonemap=hable,"
    "zscale=t=bt709:m=bt709:r=tv,format=yuv420p OUT"
)


def check_transfer(transfer: int, offset: int | None = None) -> None:
    """Raises BadSample for the transfer function of an HDR video."""
    if transfer in HDR_TRANSFERS:
        raise BadSample(Reason.HDR, f"{HDR_TRANSFERS[transfer]}; tone-map it: {TONE_MAP}", offset)
