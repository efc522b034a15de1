"""What the measurements on CUDA devices share."""
