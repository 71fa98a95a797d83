"""Training through quantization: `bw.prepare_qat`, `bw.convert_qat`."""
