"""The `golden` fixture: texts that tests compare with tests/golden/<name>.txt.

`pytest --update-golden` writes what the tests found; read the difference before committing it.
"""

from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

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


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(Path(__file__).parent / "golden", request.config.getoption("--update-golden"))
