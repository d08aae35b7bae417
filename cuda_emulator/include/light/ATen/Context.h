// In place of what each header of an operator includes and few texts use: a text that does takes the full headers.
#pragma once
