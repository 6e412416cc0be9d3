"""Answer questions over documents whose state is reused, in ten lines."""

from redknot import LLM, Document, QuestionDrop

ferry = Document("The ferry to Brennay is called the Grey Wagtail. It sails at seven.", "Ferry")
school = Document("The school of Brennay has forty pupils. Its emblem is a hedgehog.", "School")

llm = LLM("embedded", policy=QuestionDrop(first=0.34, then=0.17, until=1 / 3))
for document in (ferry, school):
    llm.segment(document)
answer = llm.generate([school, ferry], "What is the emblem of the school?", max_tokens=16)
print(answer.text, answer.policy, f"{answer.ttft:.2f} s", answer.reuse.reused_tokens)
