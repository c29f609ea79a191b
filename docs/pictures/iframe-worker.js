// Search of a site opened from disk. Browsers refuse to start a worker from a file, so its script
// runs in a hidden frame, and messages are passed on as events. With a server, nothing changes.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    #waiting = [];

    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = (this.inside = frame.contentWindow);
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) => Promise.all(urls.map((each) => this.#load(each)));
      this.#load(url).then(() => {
        this.#waiting.forEach((data) => this.#send(data));
        this.#waiting = null;
      });
    }

    postMessage(data) {
      if (this.#waiting) this.#waiting.push(data);
      else this.#send(data);
    }

    #send(data) {
      this.inside.dispatchEvent(new MessageEvent("message", { data }));
    }

    #load(url) {
      return new Promise((done, failed) => {
        const script = this.inside.document.createElement("script");
        Object.assign(script, { src: url, onload: done, onerror: failed });
        this.inside.document.body.append(script);
      });
    }
  };
  window.Worker = window.IFrameWorker;
}
