"""Measurements that a person asks for; `roofline` says where the limit is."""
