"""The processes of a job: device mesh, agreement, signals and failures; what a data-parallel strategy does."""
