"""A decoder that crashes or hangs its process on some clips, as libav does. Loaded by name in decode processes."""

import os
import signal
import time

import numpy as np

from data.decode import decode_clip
from data.types import Clip, DecodeJob


def decode(clip: Clip, job: DecodeJob) -> np.ndarray:
    if clip.key in os.environ["CRASHING_CLIPS"].split(","):
        os.kill(os.getpid(), signal.SIGSEGV)
    if clip.key in os.environ["HANGING_CLIPS"].split(","):
        time.sleep(3600)
    return decode_clip(clip, job)
