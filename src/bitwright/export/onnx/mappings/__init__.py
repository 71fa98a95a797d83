"""The ONNX forms of ops, one file per family; see `export.onnx.mapping`."""
