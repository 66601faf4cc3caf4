"""The range of transformers, and the tables in docs/models.md."""

import ast
import re
import subprocess
import sys
import warnings
from pathlib import Path

import matrix
import pytest
import tables
from families import CASES

from hf_dynyarn import versions

ROOT = Path(__file__).resolve().parent.parent


class TestRange:
    @pytest.mark.parametrize("version", [(4, 56), (5, 25), (6, 0)])
    def test_warns_outside(self, monkeypatch, version):
        monkeypatch.setattr(versions, "TRANSFORMERS", version)
        with pytest.warns(UserWarning, match=r"with transformers 4\.57 to 5\.24, got"):
            versions.warn_if_unknown()

    @pytest.mark.parametrize("version", [(4, 57), (5, 0), (5, 24)])
    def test_is_silent_inside(self, monkeypatch, version):
        monkeypatch.setattr(versions, "TRANSFORMERS", version)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            versions.warn_if_unknown()

    def test_the_import_warns_once(self):
        code = (
            "import transformers, warnings\n"
            "transformers.__version__ = '5.99.0.dev0'\n"
            "with warnings.catch_warnings(record=True) as seen:\n"
            "    warnings.simplefilter('always')\n"
            "    import hf_dynyarn, hf_dynyarn.patch, hf_dynyarn\n"
            "print([str(w.message) for w in seen if 'hf_dynyarn' in str(w.message)])\n"
        )
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        (message,) = ast.literal_eval(output.stdout.strip().splitlines()[-1])
        assert "got 5.99.0.dev0" in message

    def test_is_the_one_of_the_matrix(self):
        ends = [tuple(int(part) for part in v.split(".")[:2]) for v in matrix.VERSIONS]
        assert (ends[0], ends[-1]) == (versions.OLDEST, versions.NEWEST)
        workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
        assert re.findall(r'"(\d+\.\d+\.\d+)"', workflow) == list(matrix.VERSIONS)
        assert matrix.VERSIONS[0] in (ROOT / ".ci" / "run").read_text()

    def test_no_other_module_asks_for_it(self):
        for path in (ROOT / "hf_dynyarn").glob("*.py"):
            imported = re.search(r"from transformers import[^)]*__version__", path.read_text())
            assert (imported is not None) == (path.name == "versions.py"), path.name


class TestTables:
    def test_every_family_and_variant_is_there(self):
        text = tables.DOCS.read_text().split(tables.BEGIN)[1].split(tables.END)[0]
        rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", text, re.MULTILINE)
        listed = ["-".join(part for part in row if part) for row in rows[1:]]
        assert listed == list(CASES)

    def test_rows_are_what_the_families_do(self):
        text = tables.DOCS.read_text()
        for case in ("llama", "ministral"):
            shown = re.search(
                r"^(\| `" + case + r"` .*)\| \S+ \| \S+ \| \S+ \|$", text, re.MULTILINE
            )
            assert tables.row(case).startswith(shown.group(1))
