"""The `golden` fixture: texts that tests compare with tests/golden/<name>.txt.

`pytest --update-golden` writes what the tests found; read the difference before committing it.

And a check that goes along with every test: kernels of one name have one text. With
`--skip-missing`, tests that need a package which is not installed are skipped (`make test-floors`).
"""

import hashlib
import os
import re
import signal
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

if not Path("/dev/nvidiactl").exists():
    # Kernels of the GPU backend run in Triton's interpreter; Triton reads this on import.
    os.environ.setdefault("TRITON_INTERPRET", "1")

OPTIONAL = (
    *("torch", "triton", "onnxruntime", "onnxscript", "openvino", "safetensors"),
    *("yaml", "PIL", "mypy"),
    *("tokenizers", "jinja2", "llguidance", "starlette", "uvicorn", "httpx", "openai"),
)
"""Packages of the extras, by the names they are imported with."""

# Tests assert behaviour, never time: a busy machine is no failure, and CI sees the same examples.
settings.register_profile(
    "bitwright", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("bitwright")


@dataclass(frozen=True)
class Golden:
    folder: Path
    update: bool

    def __call__(self, name: str, text: str) -> None:
        """Fail unless `text` is the golden text called `name` ("passes/fold" is in a folder)."""
        __tracebackhide__ = True
        path = self.folder / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        expected = path.read_text(encoding="utf-8") if path.exists() else None
        if text == expected:
            return
        if self.update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif expected is None:
            pytest.fail(f"there is no {path}; pytest --update-golden writes it", pytrace=False)
        else:
            lines = unified_diff(expected.splitlines(), text.splitlines(), str(path), "found")
            pytest.fail("\n".join(lines), pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden texts")
    parser.addoption(
        "--random-graphs", type=int, default=200, help="random graphs to compile (nightly: 10000)"
    )
    parser.addoption("--exhaustive", action="store_true", help="run tests marked exhaustive too")
    parser.addoption(
        "--skip-missing",
        action="store_true",
        help="skip what needs an optional package that is absent",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked exhaustive unless they are asked for."""
    if config.getoption("--exhaustive"):
        return
    dropped = [item for item in items if item.get_closest_marker("exhaustive")]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    """A file that cannot be imported without an optional package is skipped as a whole."""
    report = yield
    if report.failed and collector.config.getoption("--skip-missing"):
        found = re.search(r"No module named '(\w+)", str(report.longrepr))
        if found and found[1] in OPTIONAL:
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 1, f"Skipped: {found[1]} is not installed")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """The same for one test that imports such a package itself."""
    report = yield
    if report.failed and item.config.getoption("--skip-missing"):
        missing = getattr(call.excinfo.value, "name", None) or ""
        if isinstance(call.excinfo.value, ImportError) and missing.split(".")[0] in OPTIONAL:
            report.outcome = "skipped"
            report.longrepr = (str(item.path), 1, f"Skipped: {missing} is not installed")
    return report


@pytest.fixture
def interruptible():
    """SIGINT raises, even if the tests run in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(Path(__file__).parent / "golden", request.config.getoption("--update-golden"))


@pytest.fixture(autouse=True, scope="session")
def names_decide_texts():
    """A kernel is found in the cache by its name, so whatever shapes its text is in its key.

    Every kernel that a test lowers is emitted, also where it was found, and compared with what the
    same name stood for before, in this process or in one that filled the cache.
    """
    from bitwright.backends.cpu.cache.objects import key as key_of_text
    from bitwright.backends.cpu.codegen.emit import Module
    from bitwright.backends.cpu.lowering.context import Lowering

    seen, kernel = {}, Lowering.kernel

    def checked(self, family, key, emit):
        count = len(self.kernels)
        made = kernel(self, family, key, emit)
        if self.store is None and len(self.kernels) > count:  # it was emitted just now
            text, signature = self.text(made), made.signature
        else:
            module = Module(self.target, made.name)
            signature = emit(module, made.name)
            text = module.text()
        found = hashlib.sha256(text.encode()).digest(), signature, made.signature
        known = seen.setdefault((self.target, made.name), found)
        facts = self.store and self.store.facts(made.name)
        is_other = facts and facts["code"] != key_of_text(text, self.target)
        if known != found or signature != made.signature or is_other:
            message = f"kernels named {made.name} differ; this does not tell them apart: {key!r}"
            pytest.fail(message)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lowering, "kernel", checked)
        yield
