"""Messages to tokens and back: tokenizer, renderers, the call form, and the conversation that only ever extends.

    template.py      special tokens and chat template of the "etude" format
    tokenizer.py     byte-level BPE: bytes-safe, never reads a special token out of ordinary text
    calls.py         the XML-like form of tool calls and results: parser and formatter
    renderer.py      EtudeRenderer, ChatMLRenderer, JinjaRenderer, choose_renderer
    conversation.py  token list plus everything recorded per token; gives records.Segment

Nothing here imports torch.
"""
