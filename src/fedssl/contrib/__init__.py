"""Studies and checks that training does not need."""
