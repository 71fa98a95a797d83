"""What this machine has, what the compiler uses of it, and what was measured: `bw.hardware()`.

gpus        the GPUs that the driver lists
probes      small products of each element type
selection   the kernel that the compiler selects for a probe, and its instruction
timing      medians and spread of runs, sides interleaved
remembered  measurements on disk, per machine and target
measure     rates of kernels and of instructions
preferences batch and block sizes, layout, threads: what is fastest here
facts       all of it as one object
"""
