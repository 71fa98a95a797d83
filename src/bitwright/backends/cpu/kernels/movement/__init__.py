"""Data movement ops: selection and emission of kernels."""
