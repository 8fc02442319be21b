"""What a step does beyond verifying chains, each feature in a file of its own."""
