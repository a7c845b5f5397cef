from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import sys

import pytest

from sinklab import registry as registry_module
from sinklab.errors import ConfigurationError, ContractError, UnknownNameError
from sinklab.registry import KINDS, Registry, registry_of


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
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: registry.points)
    registry.points = []

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


@pytest.mark.parametrize("name", ["Apple", "2apples", "ap-ple", "", "ap ple", "_apple"])
def test_names_are_lower_case_words(fruits, name):
    with pytest.raises(ConfigurationError, match="lower-case words joined by underscores"):
        fruits.register(name)


def test_outside_packages_use_entry_points(fruits, tmp_path, monkeypatch):
    (tmp_path / "orchard.py").write_text(PLUGIN.format(name="quince", summary="x"))
    monkeypatch.syspath_prepend(tmp_path)
    fruits.points = [importlib.metadata.EntryPoint("quince", "orchard:Fruit", "sinklab.fruits")]
    assert fruits.names() == ["quince"]
    assert "orchard" not in sys.modules
    assert fruits["quince"].__module__ == "orchard"
    assert fruits.summary("quince") == "A fruit."
    del sys.modules["orchard"]


def test_an_outside_plugin_cannot_take_the_place_of_another(fruits):
    fruits.write("apple", PLUGIN.format(name="apple", summary="x"))
    fruits.points = [importlib.metadata.EntryPoint("apple", "orchard:Fruit", "sinklab.fruits")]
    with pytest.raises(ContractError, match=r"two fruit plug-ins are called 'apple'; one of them is orchard:Fruit"):
        fruits.names()
    fruits.points = [importlib.metadata.EntryPoint("fig", f"{place}:Fig", "sinklab.fruits") for place in ("one", "two")]
    with pytest.raises(ContractError, match="two fruit plug-ins are called 'fig'"):
        fruits.names()


def test_a_kind_is_found_by_both_of_its_words():
    assert registry_of("probe") is registry_of("probes") is KINDS["probes"]
    with pytest.raises(UnknownNameError, match=r"no kind of plug-in called 'prob'\. Did you mean 'probes'"):
        registry_of("prob")


def test_every_kind_has_plugins_and_they_all_import():
    assert set(KINDS) >= {"operations", "probes", "corpora"}
    for registry in KINDS.values():
        assert registry.names(), registry.plural
        assert [registry[name].name for name in registry] == registry.names()
