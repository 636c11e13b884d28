"""Several processes that train one model: who holds what, and how their numbers become one reading."""
