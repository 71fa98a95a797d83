"""Arrays that programs return."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from bitwright.backends.cpu.runtime.memory import ALIGN, LARGE, new_array


@pytest.mark.parametrize("element", [np.float32, np.uint8, np.bool_, ml_dtypes.bfloat16])
def test_large_arrays_are_aligned_and_allocated_once(element):
    tracemalloc.start()
    found = new_array((3, LARGE), element)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.shape == (3, LARGE) and found.dtype == element and found.flags.c_contiguous
    assert found.ctypes.data % ALIGN == 0
    assert peak < found.nbytes + LARGE


@pytest.mark.parametrize("shape", [(), (0, 5), (7,)])
def test_numpy_allocates_small_arrays(shape):
    found = new_array(shape, np.float32)
    assert found.shape == shape and found.base is None
