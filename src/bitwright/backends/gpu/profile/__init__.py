"""Times of kernels and peaks of the device."""
