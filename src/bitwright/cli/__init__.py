"""The command line: parses, calls, prints.

Errors print one paragraph and exit with status 2; `--debug` shows the traceback. Each module
defines the commands of one topic; importing it adds them to the group.
"""

from bitwright.cli import bench as _bench
from bitwright.cli import bench_llm as _bench_llm
from bitwright.cli import calibrate as _calibrate
from bitwright.cli import check as _check
from bitwright.cli import compare as _compare
from bitwright.cli import convert as _convert
from bitwright.cli import diff as _diff
from bitwright.cli import drift as _drift
from bitwright.cli import explain as _explain
from bitwright.cli import hardware as _hardware
from bitwright.cli import ledger as _ledger
from bitwright.cli import model as _model
from bitwright.cli import perplexity as _perplexity
from bitwright.cli import quantize as _quantize
from bitwright.cli import report as _report
from bitwright.cli import train as _train
from bitwright.cli import tune as _tune
from bitwright.cli import tune_kernels as _tune_kernels
from bitwright.cli import verify as _verify
from bitwright.cli.common import main
from bitwright.cli.language import generate as _generate
from bitwright.cli.language import serve as _serve

# the imports register the commands
assert all(
    (
        _bench,
        _bench_llm,
        _calibrate,
        _check,
        _compare,
        _convert,
        _diff,
        _drift,
        _explain,
        _generate,
        _hardware,
        _ledger,
        _model,
        _perplexity,
        _quantize,
        _report,
        _serve,
        _train,
        _tune,
        _tune_kernels,
        _verify,
    )
)
__all__ = ["main"]
