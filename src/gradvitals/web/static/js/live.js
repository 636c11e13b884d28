// News from the server: which run has come how far. The browser connects again by itself.

const SILENCE = 14000; // the server says something every few seconds, whatever happens

export class Live {
  constructor({ onnews, onstate }) {
    this.onnews = onnews;
    this.onstate = onstate;
    this.connect();
    // A browser has few connections to one server, and a page that nobody sees shall not hold one.
    document.addEventListener("visibilitychange", () => { if (document.hidden) this.source.close(); else this.connect(); });
    setInterval(() => { if (!document.hidden && Date.now() - this.heard > SILENCE) { this.onstate("lost"); this.connect(); } }, 3000);
  }

  connect() {
    this.source?.close();
    this.heard = Date.now();
    const source = this.source = new EventSource("/api/stream");
    source.onopen = () => { this.heard = Date.now(); this.onstate("open"); };
    source.onerror = () => {
      this.onstate("lost");
      if (source.readyState === EventSource.CLOSED) setTimeout(() => { if (this.source === source) this.connect(); }, 2000);
    };
    source.onmessage = (event) => {
      this.heard = Date.now();
      this.onnews(JSON.parse(event.data));
    };
    source.addEventListener("beat", () => { this.heard = Date.now(); });
  }
}
