"""Datasets in object stores: small files are copied, and tokens are read by parts through a cache.

Prepare:  writing                                 (`prepare --output s3://...`)
Train:    folder -> array                         (the `tokens` of a `TokenDataset`)
"""
