"""Non-maximum suppression: selection and emission of kernels."""
