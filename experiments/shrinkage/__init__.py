"""Steps scaled by how much of each gradient is signal, against the same optimizer with as wide a sweep."""
