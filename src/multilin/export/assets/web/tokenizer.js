// Text as tokens and back, with the library @huggingface/tokenizers (tokenizers.min.mjs, Apache 2.0).
import {Tokenizer} from "./tokenizers.min.mjs";

export class TextCodec {
  constructor(content) {
    const vocabulary = content.model.vocab, ids = content.added_tokens.map(token => token.id);
    const size = Array.isArray(vocabulary) ? vocabulary.length : Object.keys(vocabulary).length;
    this.numTokens = Math.max(size, ...ids.map(id => id + 1));
    const special = content.added_tokens.filter(token => token.special);
    this.special = new Set(special.map(token => token.id));
    // Special tokens that are spelled out in a prompt are text, as in `multilin generate`.
    const added = content.added_tokens.filter(token => !token.special);
    this.tokenizer = new Tokenizer({...content, added_tokens: added, post_processor: null}, {});
  }

  encode(text) {
    return text ? this.tokenizer.encode(text, {add_special_tokens: false}).ids : [];
  }

  decode(ids) {
    const kept = ids.filter(id => !this.special.has(id));
    return kept.length ? this.tokenizer.decode(kept, {clean_up_tokenization_spaces: false}) : "";
  }
}

/** Turns tokens into pieces of text that are certain: no half of a character. */
export class TextStream {
  constructor(codec, context = []) {
    this.codec = codec;
    // The context may end inside a character, whose first tokens are held back as those of new text are.
    let cut = 0;
    while (cut < 4 && codec.decode(context.slice(-8, context.length - cut)).endsWith("\ufffd")) cut++;
    const whole = context.slice(0, context.length - (cut % 4));
    this.before = whole.slice(-8); // decoders may treat the first token of a text in another way
    this.pending = context.slice(whole.length);
  }

  put(id) {
    this.pending.push(id);
    const known = this.codec.decode(this.before), text = this.codec.decode([...this.before, ...this.pending]);
    // A character of four bytes may be spread over as many tokens; what is longer is no character.
    if (text.endsWith("\ufffd") && this.pending.length < 4) return "";
    this.before = [...this.before, ...this.pending].slice(-8);
    this.pending = [];
    return text.slice(known.length);
  }
}
