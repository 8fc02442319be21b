"""What users may say in `--speculative-config`, checked and as frozen settings."""
