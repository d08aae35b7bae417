"""The judge under the names that other projects' harnesses call."""
