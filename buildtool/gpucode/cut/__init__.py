"""Plans and checks how GPU code is cut out of one file."""
