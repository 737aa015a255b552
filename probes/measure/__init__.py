"""The measurements, each written against one small interface to the device."""
