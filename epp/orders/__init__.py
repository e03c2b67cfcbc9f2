"""Experimental orders to engines that no request asked for."""
