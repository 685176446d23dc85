from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from app.data_tools.preview import preview
from app.settings.config import RunConfig
from data.errors import DataError
from data.tools.synthetic import SynthConfig, synthesize


def run_config(folder: Path, *overrides: str) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(f"""
run: {{name: look}}
data:
  sources: [{{path: "{folder}/shards", caption: "json:captions"}}]
  buckets: {{table: [1x64x96, 9x64x96, 9x96x64]}}
  batch: {{memory_tokens: 400, text_tokens: 48}}
""")
    return RunConfig.load(path, list(overrides))


def test_every_bucket_has_a_contact_sheet_of_its_clips(tmp_path: Path) -> None:
    sizes = ((64, 96), (96, 64))
    synthesize(tmp_path, SynthConfig(clips=20, images=6, shards=1, sizes=sizes, frames=(9,), koala=False))
    written = preview(run_config(tmp_path), tmp_path / "preview", samples=3, frames=4)
    assert [path.name for path in written] == ["1x64x96.png", "9x64x96.png", "9x96x64.png"]
    sheet = np.asarray(Image.open(written[1]))
    assert sheet.shape[:2] == (6 + 3 * (2 * 64 + 6), 6 + 4 * (2 * 96 + 6) + 300)
    pictures = [sheet[6:134, 6 + column * 198 : 198 * (column + 1)].astype(int) for column in range(4)]
    assert all(np.abs(picture - 255).mean() > 20 for picture in pictures)  # each holds a picture, not paper
    assert np.abs(pictures[0] - pictures[3]).mean() > 1  # the shape has moved


def test_a_table_nothing_fits_is_an_error_that_says_so(tmp_path: Path) -> None:
    synthesize(tmp_path, SynthConfig(clips=4, images=0, shards=1, sizes=((64, 96),), frames=(9,), koala=False))
    with pytest.raises(DataError, match="no sample can be trained"):
        preview(run_config(tmp_path, "data.buckets.table=[129x720x1280]"), tmp_path / "preview")
