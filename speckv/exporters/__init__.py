"""What speckv exports policies to, one file a target."""
