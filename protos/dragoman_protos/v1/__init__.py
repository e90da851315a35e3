"""Package dragoman.v1."""
