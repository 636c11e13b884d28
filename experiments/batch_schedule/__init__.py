"""A batch that follows the noise scale, against the best fixed one."""
