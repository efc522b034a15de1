"""What a machine without accelerators needs for stock verl."""
