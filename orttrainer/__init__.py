"""orttrainer"""
