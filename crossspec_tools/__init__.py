"""What prepares models and files for serving and serves no request: training, records, n-gram stores, clusters."""
