// Browsers start no worker for a page that is opened from a disk. There, the theme's search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #waiting = [];
    #scope = null;

    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.addEventListener("load", () => this.#start(frame, url), { once: true });
      document.body.append(frame);
    }

    #start(frame, url) {
      const scope = frame.contentWindow;
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = scope.document.createElement("script");
      script.src = url;
      script.addEventListener("load", () => {
        this.#scope = scope;
        this.#waiting.splice(0).forEach((data) => this.postMessage(data));
      });
      scope.document.body.append(script);
    }

    postMessage(data) {
      if (this.#scope) this.#scope.dispatchEvent(new MessageEvent("message", { data }));
      else this.#waiting.push(data);
    }
  };
}
