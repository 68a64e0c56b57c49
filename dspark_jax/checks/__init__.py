"""What can be wrong between a drafter, a target and an engine: small pure checks that find it."""
