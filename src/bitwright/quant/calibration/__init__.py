"""Calibration: run a model over data and choose quantization parameters from its values.

Ranges of named values (`bw.calibrate`), for `insert_q_dq` and the tensor API:

    observed              which values of a graph are observed by default
    intermediate_outputs  run the compiled model with chosen values as extra outputs
    statistics            streaming statistics of a value (fast_statistics: native code)
    calibrate, ranges     run over batches -> Ranges: statistics by name, with a file format
    methods               statistics -> range -> QuantParams
                          (scoring, divergence: objectives; search: range search; mixed_widths)
    record                Ranges -> CalibrationRecord

Statistics for model quantization (`bw.quantize`):

    intermediate_outputs -> model_outputs   per-channel min and max, and sampled rows, of a batch
    stats                                   CalibrationStats of each quantization point
    run                                     CalibrationRun: all batches, some of them held out
    stats_file                              save and resume a run

Shared: progress, interrupt, time_limit, blas, machine_code.
"""
