use reqwest::header::HeaderMap;
use serde_json::Value;

/// A complete HTTP response.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub text: String,
    /// Path of the request.
    path: String,
}

impl Answer {
    pub async fn read(response: reqwest::Response) -> Self {
        let status = response.status().as_u16();
        let headers = response.headers().clone();
        let path = response.url().path().to_owned();
        let text = response.text().await.expect("the answer is read to its end");
        Self {
            status,
            headers,
            text,
            path,
        }
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("not JSON ({error}): {self:?}"))
    }

    /// The body of a successful response.
    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{self:?}");
        self.json()
    }

    /// The `detail` of an error response. Below `/v1` and `/v2` the body repeats it in the compatible form,
    /// and `errors` lists it by field.
    #[track_caller]
    pub fn refused(&self, status: u16) -> String {
        assert_eq!(self.status, status, "{self:?}");
        let detail = self.json()["detail"]
            .as_str()
            .unwrap_or_else(|| panic!("no detail: {self:?}"))
            .to_owned();
        let compatible = ["/v1/", "/v2/"].iter().any(|root| self.path.starts_with(root));
        let body = self.json();
        for (name, said) in body.as_object().expect("an object") {
            match name.as_str() {
                "detail" => {}
                "error" if compatible => assert_eq!(said["message"], detail, "{self:?}"),
                "message" if compatible => assert_eq!(*said, detail, "{self:?}"),
                "errors" => {
                    for wrong in said.as_array().expect("a list") {
                        let part = |name: &str| wrong[name].as_str().expect("a text");
                        assert!(
                            detail.contains(part("field")) && detail.contains(part("message")),
                            "{self:?}"
                        );
                    }
                }
                _ => panic!("an error response has only its detail: {self:?}"),
            }
        }
        assert_eq!(self.header("content-type"), "application/json");
        detail
    }

    #[track_caller]
    pub fn header(&self, name: &str) -> &str {
        let value = self
            .headers
            .get(name)
            .unwrap_or_else(|| panic!("no header {name}: {self:?}"));
        value.to_str().expect("an ASCII header")
    }
}
