"""GPUs from the driver's libraries, with stand-ins for the libraries."""

from bitwright.machine.gpus import Gpu, find_gpus, tensor_core_formats


def missing(name):
    raise OSError(name)


class Nvml:
    """One device with compute capability 9.0; `fails` names a call that returns an error."""

    def __init__(self, fails="", count=1):
        self.fails, self.count, self.is_shut_down = fails, count, False

    def __getattr__(self, name):
        def call(*arguments):
            if name == self.fails:
                return 3
            self.answer(name, arguments)
            return 0

        return call

    def nvmlShutdown(self):  # noqa: N802
        self.is_shut_down = True

    def answer(self, name, arguments):
        if name == "nvmlDeviceGetCount_v2":
            arguments[0]._obj.value = self.count
        elif name == "nvmlDeviceGetName":
            arguments[1].value = b"Example 9000"
        elif name == "nvmlDeviceGetCudaComputeCapability":
            arguments[1]._obj.value, arguments[2]._obj.value = 9, 0
        elif name == "nvmlDeviceGetMemoryInfo":
            arguments[1]._obj.total = 80 << 30


class Cuda(Nvml):
    def answer(self, name, arguments):
        if name == "cuDeviceGetCount":
            arguments[0]._obj.value = self.count
        elif name == "cuDeviceGetName":
            arguments[0].value = b"Example 7000"
        elif name == "cuDeviceTotalMem_v2":
            arguments[0]._obj.value = 16 << 30
        elif name == "cuDeviceGetAttribute":
            arguments[0]._obj.value = {75: 7, 76: 5, 16: 40}[arguments[1].value]


def loader(nvml=None, cuda=None):
    def load(name):
        library = nvml if "nvidia-ml" in name or "nvml" in name else cuda
        return library if library is not None else missing(name)

    return load


def test_without_a_driver_there_are_none():
    assert find_gpus(missing) == ((), "no driver is installed")
    found, why = find_gpus()
    assert bool(found) != bool(why)


def test_nvml_comes_first():
    nvml = Nvml()
    (gpu,), why = find_gpus(loader(nvml, Cuda()))
    assert (gpu.name, gpu.capability, gpu.memory_bytes, why) == (
        "Example 9000",
        (9, 0),
        80 << 30,
        "",
    )
    assert "f8e4m3fn" in gpu.formats and gpu.has_dp4a and nvml.is_shut_down
    assert "compute capability 9.0, 80 GiB" in str(gpu)
    assert gpu.as_json()["tensor_core_formats"] == gpu.formats


def test_libcuda_is_the_fallback():
    (gpu,), _ = find_gpus(loader(Nvml("nvmlInit_v2"), Cuda()))
    assert gpu == Gpu("Example 7000", (7, 5), 16 << 30, 40)


def test_a_driver_that_fails_gives_a_reason():
    found, why = find_gpus(loader(Nvml("nvmlInit_v2"), Cuda("cuInit")))
    assert found == () and "nvmlInit_v2 returned 3" in why and "cuInit returned 3" in why
    assert find_gpus(loader(Nvml(count=0), Cuda(count=0))) == ((), "the driver lists no device")

    class Other:
        pass

    assert find_gpus(loader(Other(), Other()))[0] == ()


def test_formats_by_compute_capability():
    assert tensor_core_formats((6, 1)) == ()
    assert tensor_core_formats((7, 0)) == ("f16",)
    assert "int4" in tensor_core_formats((7, 5)) and "bf16" not in tensor_core_formats((7, 5))
    assert "bf16" in tensor_core_formats((8, 6)) and "f8e5m2" not in tensor_core_formats((8, 6))
    assert "f8e5m2" in tensor_core_formats((8, 9)) and "f4e2m1" in tensor_core_formats((12, 0))
