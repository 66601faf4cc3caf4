"""What the plug-in stands on in vLLM, in the one installed and in the sources of others.

`VLLM_SOURCES=FOLDER` names the sources of another version, `make test-vllm-next` fetches some: a
wheel for CUDA is read, not installed.
"""

import ast
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import vllm
from test_vllm import PROMPTS, check, engine, folder, generate, stock
from vllm.config import PassConfig

from hf_dynyarn.vllm import needs, plugin, refusals

__all__ = ["folder", "stock"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_op:FutureWarning")

INSTALLED = Path(find_spec("vllm").origin).parent
SOURCES = [INSTALLED, *map(Path, filter(None, [os.environ.get("VLLM_SOURCES")]))]


@pytest.fixture(params=SOURCES, ids=lambda folder: str(folder.parent.name))
def sources(request):
    return request.param


def parsed(sources, module):
    path = sources.joinpath(*module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def children(node):
    """Functions, classes and variables right within, by name."""
    found = {}
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            found[child.name] = child
        elif isinstance(child, ast.AnnAssign):
            found[ast.unparse(child.target)] = child
        elif isinstance(child, ast.Assign):
            found |= {ast.unparse(target): child for target in child.targets}
    return found


def member(tree, node, name):
    """A member of a class, or of a class of the same module that it is derived from."""
    if name in children(node):
        return children(node)[name]
    bases = [ast.unparse(base).split("[")[0] for base in node.bases]
    owners = [children(tree)[base] for base in bases if base in children(tree)]
    found = (member(tree, owner, name) for owner in owners)
    return next((one for one in found if one is not None), None)


def lacking(tree, names):
    for name, parameters in names.items():
        *path, last = name.split(".")
        owner = children(tree)[path[0]] if path else None
        node = member(tree, owner, last) if owner else children(tree).get(last)
        if node is None:
            yield name
        elif isinstance(node, ast.FunctionDef) and parameters:
            taken = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
            if [one for one in taken if one in parameters] != list(parameters):
                yield f"{name}{taken}"


@pytest.mark.parametrize("module", needs.NEEDS)
def test_names_and_parameters(sources, module):
    assert not list(lacking(parsed(sources, module), needs.NEEDS[module]))


def test_teeth(sources):
    module = "vllm.config.model"
    names = {
        "ModelConfig.get_and_verify_length": (),
        "ModelConfig.get_and_verify_max_len": ("self", "length"),
    }
    assert len(list(lacking(parsed(sources, module), names))) == 2
    (wrong,) = (name for name in names if not needs._is_there(module, name, ()))
    assert wrong == "ModelConfig.get_and_verify_length"
    assert not needs._is_there(module, "ModelConfig.get_and_verify_max_len", ("self", "length"))
    assert not needs._is_there("vllm.config.modell", "ModelConfig", ())


def test_all_that_is_imported_is_listed():
    listed = {name.split(".")[0] for names in needs.NEEDS.values() for name in names}
    imported = set()
    for file in Path(needs.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "vllm":
                imported |= {alias.name for alias in node.names}
    assert imported - listed == {"current_platform", "init_logger"}  # vLLM's plug-ins all use them


# Files of vLLM with the classes of `refusals.SERVED`, where these are not in llama.py.
FILES = ("commandr", "gemma", "glm4", "granite", "llama", "mixtral", "qwen2", "qwen2_moe", "qwen3")


@pytest.mark.parametrize("name", [*FILES, "qwen3_moe"])
def test_models_leave_the_rotation_to_the_embedding(sources, name):
    text = (sources / "model_executor" / "models" / f"{name}.py").read_text()
    calls = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".rotary_emb")
    ]
    assert [ast.unparse(call) for call in calls if call.args] == [
        "self.rotary_emb(positions, q, k)"
    ]
    assert "cos_sin_cache" not in text


def test_passes_that_fuse_a_rotation(sources):
    """Each that is in the sources is switched off by a switch that the plug-in knows as such."""
    fusions = sources / "compilation" / "passes" / "fusion"
    assert len([path for path in fusions.glob("*.py") if "rope" in path.name]) == 4
    configured = children(children(parsed(sources, "vllm.config.compilation"))["PassConfig"])
    switches = {name for name in configured if plugin.fuses_rotation(name)}
    assert switches == {
        "enable_qk_norm_rope_fusion",
        "fuse_rope_kvcache_cat_mla",
        "fuse_rope_kvcache",
        "fuse_qk_norm_rope_kvcache",
    }


def test_passes_are_off(folder, stock):
    switches = [name for name in PassConfig.__dataclass_fields__ if plugin.fuses_rotation(name)]
    config = {"pass_config": dict.fromkeys(switches, True)}
    llm = engine(folder, enforce_eager=False, compilation_config=config)
    passes = llm.llm_engine.vllm_config.compilation_config.pass_config
    assert [getattr(passes, name) for name in switches] == [False] * 4
    check(generate(llm, PROMPTS[3:]), stock, PROMPTS[3:])


def test_a_version_that_lacks_something(folder, monkeypatch):
    monkeypatch.setitem(needs.NEEDS, "vllm.config.model", {"ModelConfig.get_length": ("self",)})
    needs.missing.cache_clear()
    message = (
        rf"must have vllm\.config\.model\.ModelConfig\.get_length .* got version {vllm.__version__}"
    )
    try:
        with pytest.raises(ValueError, match=message):
            engine(folder)
    finally:
        needs.missing.cache_clear()


def test_a_version_that_was_never_run(folder, stock, monkeypatch):
    monkeypatch.setattr(refusals, "TESTED", ("0.1.0", "0.2.0"))
    said = []
    monkeypatch.setattr(
        refusals.logger, "warning_once", lambda text, *args: said.append(text % args)
    )
    check(generate(engine(folder), PROMPTS[4:]), stock, PROMPTS[4:])
    message = f"hf_dynyarn was run with vLLM 0.1.0 and 0.2.0, and never with {vllm.__version__}"
    assert any(message in one for one in said)
