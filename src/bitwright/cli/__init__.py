"""The command line: parses, calls, prints.

Errors print one paragraph and exit with status 2; `--debug` shows the traceback. Each module
defines the commands of one topic; importing it adds them to the group.
"""

from bitwright.cli import bench as _bench
from bitwright.cli import calibrate as _calibrate
from bitwright.cli import convert as _convert
from bitwright.cli import explain as _explain
from bitwright.cli import hardware as _hardware
from bitwright.cli import model as _model
from bitwright.cli import quantize as _quantize
from bitwright.cli import train as _train
from bitwright.cli import tune_kernels as _tune_kernels
from bitwright.cli.common import main

# the imports register the commands
assert all(
    (_bench, _calibrate, _convert, _explain, _hardware, _model, _quantize, _train, _tune_kernels)
)
__all__ = ["main"]
