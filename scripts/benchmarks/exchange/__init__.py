"""What `dropin.py` runs other projects' tests with: a pytest plugin, and a hub that it makes."""
