from pathlib import Path

import pytest

from data.tools.synthetic import SynthConfig, synthesize


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 clips and 12 stills in 3 shards, and the clips as a Koala-36M table."""
    folder = tmp_path_factory.mktemp("synth")
    synthesize(folder, SynthConfig(clips=48, images=12, shards=3, seed=1, frames=(9, 17, 21)))
    return folder
