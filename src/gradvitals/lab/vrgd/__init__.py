"""Is VRGD better than its base optimizer, when both get the same learning-rate sweep?"""
