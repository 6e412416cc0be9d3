"""Many requests, one device: scheduler, runner, and the process that they live in."""
