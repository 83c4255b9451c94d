"""What a rank records of its iterations."""
