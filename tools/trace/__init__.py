"""Which kernels models call, from where, and in which ops: read from records of runs, and from nothing else."""
