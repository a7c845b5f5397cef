from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import sys

import pytest

from sinklab import registry as registry_module
from sinklab.attention.operation import Operation
from sinklab.attention.probe import Probe
from sinklab.corpora import resolve_corpus
from sinklab.errors import ConfigurationError, ContractError, UnknownNameError
from sinklab.models.architecture import Architecture
from sinklab.registry import (
    KINDS,
    Registry,
    claims,
    interventions,
    operations,
    policies,
    probes,
    read_outs,
    recipes,
    spelled,
    split_specs,
    tasks,
)


@pytest.fixture
def fruits(tmp_path, monkeypatch):
    """A registry of a kind of its own, whose package is a folder of the test."""
    folder = tmp_path / "fruits"
    folder.mkdir()
    monkeypatch.setattr(registry_module, "KINDS", dict(KINDS))
    registry = Registry("fruit", "fruits")
    monkeypatch.setattr(registry, "_folder", lambda: folder)
    package = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("sinklab.fruits", None, is_package=True))
    package.__path__ = [str(folder)]
    package.registry = registry
    monkeypatch.setitem(sys.modules, "sinklab.fruits", package)

    def write(name: str, body: str) -> None:
        (folder / f"{name}.py").write_text(body)

    registry.write = write
    yield registry
    for name in [name for name in sys.modules if name.startswith("sinklab.fruits")]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    KINDS.pop("fruits", None)


PLUGIN = '''"""{summary}"""
import sys
registry = sys.modules["sinklab.fruits"].registry
@registry.register("{name}")
class Fruit:
    """A fruit."""
'''


def test_one_file_is_all_it_takes(fruits):
    fruits.write("apple", PLUGIN.format(name="apple", summary="Round and\ngreen.\n\nMore."))
    fruits.write("_helpers", "raise AssertionError('files with an underscore are no plug-ins')")
    assert fruits.names() == ["apple"]
    assert fruits.summary("apple") == "Round and green."
    assert "sinklab.fruits.apple" not in sys.modules
    assert fruits["apple"].name == "apple"
    assert fruits["apple"] is fruits["apple"]
    assert list(fruits) == ["apple"]
    assert "apple" in fruits
    assert "pear" not in fruits


BASKET = '''"""Two of them, from a package of somebody else."""
import sys
registry = fruits = sys.modules["sinklab.fruits"].registry


@fruits.register("fig")
def fig():
    """Sweet and
    soft.

    More."""


@fruits.register("lime")
def lime():
    """Sour."""
'''


def test_a_package_brings_several_in_one_file(fruits, tmp_path, monkeypatch):
    (tmp_path / "orchard").mkdir()
    (tmp_path / "orchard" / "__init__.py").touch()
    (tmp_path / "orchard" / "basket.py").write_text(BASKET)
    monkeypatch.syspath_prepend(tmp_path)
    point = importlib.metadata.EntryPoint("orchard", "orchard", "sinklab.packages")
    monkeypatch.setattr(registry_module, "entry_points", lambda group: [point] if group == "packages" else [])
    fruits.write("apple", PLUGIN.format(name="apple", summary="x"))
    assert fruits.names() == ["apple", "fig", "lime"]
    assert (fruits.summary("fig"), fruits.summary("lime")) == ("Sweet and soft.", "Sour.")
    assert "orchard.basket" not in sys.modules
    assert fruits["lime"].name == "lime"
    assert fruits["fig"].__module__ == "orchard.basket"
    fruits.write("fig", PLUGIN.format(name="fig", summary="x"))
    with pytest.raises(ContractError, match=r"two fruit plug-ins are called 'fig'; one of them is in .*basket\.py"):
        fruits.names()
    del sys.modules["orchard.basket"], sys.modules["orchard"]


def test_an_unknown_name_suggests_the_nearest_and_lists_all(fruits):
    fruits.write("apple", PLUGIN.format(name="apple", summary="x"))
    fruits.write("pear", PLUGIN.format(name="pear", summary="x"))
    with pytest.raises(UnknownNameError) as caught:
        fruits["appel"]
    assert str(caught.value) == "no fruit is called 'appel'. Did you mean 'apple'? Known: apple, pear"
    with pytest.raises(KeyError, match=r"no fruit is called 'zzz'\. Known: apple, pear"):
        fruits.summary("zzz")


def test_a_file_that_does_not_import_is_an_error_and_names_itself(fruits):
    fruits.write("rotten", "import no_such_package")
    assert fruits.names() == ["rotten"]
    with pytest.raises(
        ContractError, match=r"sinklab\.fruits\.rotten cannot be imported: ModuleNotFoundError: .*no_such_package"
    ):
        fruits["rotten"]


def test_a_file_that_registers_another_name_is_an_error(fruits):
    fruits.write("apple", PLUGIN.format(name="pear", summary="x"))
    with pytest.raises(ContractError, match=r"must register a fruit called 'apple', the name of the file"):
        fruits["apple"]


def test_two_classes_cannot_have_one_name(fruits):
    first = type("First", (), {"__module__": "a"})
    fruits.register("apple")(first)
    fruits.register("apple")(type("First", (), {"__module__": "a"}))  # the same file imported again
    with pytest.raises(ContractError, match=r"two fruit plug-ins are called 'apple': a\.First and b\.Second"):
        fruits.register("apple")(type("Second", (), {"__module__": "b"}))


def test_a_plugin_that_lacks_something_is_refused_when_it_registers():
    """A probe without rows would end in a TypeError when it is made, one without needs in an AttributeError in a session."""
    some = {"__module__": "orchard", "metrics": ()}
    with pytest.raises(ContractError, match=r"probe 'quince': orchard\.Quince must define needs, rows$"):
        probes.register("quince")(type("Quince", (Probe,), some))
    with pytest.raises(ContractError, match=r"operation 'quince': orchard\.Quince must define normalized, weights$"):
        operations.register("quince")(type("Quince", (Operation,), {"__module__": "orchard"}))
    assert "quince" not in probes


@pytest.mark.parametrize("name", ["Apple", "2apples", "ap-ple", "", "ap ple", "_apple"])
def test_names_are_lower_case_words(fruits, name):
    with pytest.raises(ConfigurationError, match="lower-case words joined by underscores"):
        fruits.register(name)


def test_a_plugin_derives_from_the_base_of_its_kind(fruits):
    for registry in KINDS.values():
        module, _, name = registry.base.rpartition(".")
        assert registry.base == "function" or hasattr(importlib.import_module(module), name), registry.base
    with pytest.raises(ContractError, match=r"probe 'odd': .*Odd must be a class that derives from sinklab\.attention\.probe"):
        probes.register("odd")(type("Odd", (), {}))
    with pytest.raises(ContractError, match="must be a class that derives"):
        policies.register("odd")(lambda: None)
    with pytest.raises(ContractError, match=r"recipe 'odd': .* must be a function"):
        recipes.register("odd")(type("Odd", (), {}))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "recipes"])
def test_what_is_made_says_how_to_make_it_again(kind):
    registry, made = KINDS[kind], []
    shape = Architecture(max_position_embeddings=8, hidden_size=8, num_attention_heads=2)
    arguments = (shape,) if kind == "positions" else ()
    for name in registry:
        cls = registry[name]
        spec = {"name": name, **getattr(cls, "example", {})}
        if kind == "interventions":
            spec |= {key: value for key, value in {"token": 1, "vocab_size": 9, "limit": 1.0}.items() if _needs(cls, key)}
        if kind == "corpora" and _needs(cls, "path"):
            continue  # made from paths; see the tests of corpora
        plugin = registry.make(spec, *arguments)
        assert registry.make(plugin) is plugin
        if kind == "claims":
            continue  # a function's result
        said = registry.settings(plugin)
        assert said["name"] == name
        assert registry.settings(registry.make(said, *arguments)) == said
        made.append(name)
    assert made or kind == "claims"


def _needs(cls, key):
    parameter = inspect.signature(cls).parameters.get(key)
    return parameter is not None and parameter.default is parameter.empty


def test_settings_are_written_behind_a_colon_and_checked():
    assert operations.make("relu:uncounted=3, power=1e-3") == operations.make({"name": "relu", "uncounted": 3, "power": 0.001})
    assert operations.make({"uncounted": 3} | {"name": "relu"}).power == 1.0
    assert policies.make("pinned:pinned=[0, 2],window=8").pinned == (0, 2)
    assert policies.make({"name": "pinned", "pinned": [0, 2]}) == policies.make("pinned:pinned=[0,2]")
    assert probes.settings(probes.make("entropy:sink_position=2")) == {"name": "entropy", "sink_position": 2}
    assert interventions.settings(interventions.make("hide_key:heads={0: [1]},spare=2"))["heads"] == {0: [1]}
    assert tasks.make("passkey:distances=[0.5, 2]").distances == (0.5, 2.0)
    assert recipes.make("tiny:model.window=8,training.batch_size=2").model.window == 8


@pytest.mark.parametrize(
    ("registry", "spec", "message"),
    [
        (operations, "relu(uncounted=0)", r"'relu\(uncounted=0\)' cannot be read; settings follow a colon: relu:uncounted=0"),
        (operations, "relu:", "'relu:' cannot be read; write name or name:setting=value"),
        (operations, "relu:3", "cannot be read; write"),
        (operations, "relu:power=[", "the value '\\[' of power is not YAML"),
        (operations, "rleu:power=1", "no operation is called 'rleu'. Did you mean 'relu'"),
        (operations, "relu:powr=1", "'relu' has no setting 'powr'; it has normalize, uncounted, power. Did you mean 'power'"),
        (operations, "relu:uncounted=many", "operation 'relu': uncounted = 'many': input should be a valid integer"),
        (
            interventions,
            "clamp_activation",
            "intervention 'clamp_activation' needs the setting 'limit'; write clamp_activation:limit=…",
        ),
        (
            policies,
            "window:positions=sideways",
            "policy 'window': positions = 'sideways': input should be 'in_cache' or 'original'",
        ),
        (policies, {"window": 3}, "a policy needs a name"),
        (probes, "entropy:sink=2", "probe 'entropy' has no setting 'sink'; it has sink_position. Did you mean 'sink_position'"),
        (recipes, "tiny:model.windw=8", "there is no field 'model.windw'. Did you mean 'window'"),
        (read_outs, "sinks:rows=8", "read-out 'sinks' has no setting 'rows'; it has none"),
        (operations, type(operations.make("relu")), "Relu is a class; make one of it: Relu\\(…\\)"),
        (claims, "learning_rate:x=1", "claim 'learning_rate' has no setting 'x'; it has none"),
    ],
)
def test_what_cannot_be_made_says_why(registry, spec, message):
    with pytest.raises((ConfigurationError, UnknownNameError), match=message):
        registry.make(spec)


@pytest.mark.parametrize(
    ("written", "read"),
    [("no", "no"), ("2024", "2024"), ("0012", "0012"), ("1.10", "1.10"), ("2024-01-01", "2024-01-01"), ("@x", "@x"),
     ("[a] b", "[a] b"), ("'no'", "no"), ('"12"', "12"), ("null", None), ("plain", "plain")],
)  # fmt: skip
def test_a_setting_that_is_a_text_is_one_whatever_yaml_reads(written, read):
    """Norwegian is no truth value, and a commit of digits no number; what the setting takes besides a text stays."""
    corpora = KINDS["corpora"]
    assert corpora.make(f"hub_dataset:path=owner/name, subset = {written} ,revision={written}").subset == read
    assert resolve_corpus(f"owner/name:revision={written}").revision == read
    assert corpora.read("random_tokens:more=no") == {"name": "random_tokens", "more": False}


def test_lists_of_plugins_are_split_between_them():
    assert split_specs("relu:uncounted=0,power=2, softmax ,, pinned:pinned=[0,2],window=3") == [
        "relu:uncounted=0,power=2",
        "softmax",
        "pinned:pinned=[0,2],window=3",
    ]
    assert split_specs(" ") == []
    # Commas in quotes are part of a value; quotes within one are letters.
    assert split_specs("text_file:path='a,b.txt',bos=1,it's") == ["text_file:path='a,b.txt',bos=1", "it's"]
    assert KINDS["corpora"].read("""text_file:path="a,b's \\"c.txt",more=['1,]', x]""") == {
        "name": "text_file", "path": """a,b's "c.txt""", "more": ["1,]", "x"],
    }  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "sink_rate"},
        {"name": "sink_rate", "threshold": 0.25},
        {"name": "pinned", "pinned": [0, 2], "window": 3, "positions": "original"},
        {"name": "some", "one": None, "two": True, "three": "0.5", "four": {"a": 1}},
    ],
)
def test_settings_are_spelled_as_they_are_read(settings):
    assert KINDS["policies"].read(spelled(settings)) == settings
