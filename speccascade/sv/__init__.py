"""Speculative verification: how much of a draft to verify, and the plans of measurements that it decides by."""
