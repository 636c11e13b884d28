"""Bugs that people really had, each beside its fix: does `gradvitals doctor` find them and name the cause?"""
